"""What every run of pytest has, whichever tests it names."""

pytest_plugins = ["gate.plugin", "choreo_agents.testing.plugin", "pytester"]

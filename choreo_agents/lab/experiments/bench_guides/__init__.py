"""`choreo bench guides`: answers led by random JSON schemas, and what their masks cost."""

"""`choreo bench step`: where the time of a decode step goes."""

"""`choreo pml run`: a prompt answered over encoded modules, and what that saves."""

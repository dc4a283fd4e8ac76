"""What each rule for placing calls is worth: recorded workloads, simulated on several numbers of engines."""

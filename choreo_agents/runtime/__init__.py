"""Engine runtime: requests, the scheduler that plans a step, the step as plain data, and the executor that runs it."""

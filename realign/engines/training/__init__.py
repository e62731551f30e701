"""Training of one network: micro-batches, optimizer steps, schedules and weight averages."""

"""What a plan costs: time of a step and memory of a rank."""

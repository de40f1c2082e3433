"""Pure decisions: numbers in, numbers out. No clock, no randomness, no environment, no framework."""

"""What is computed: pure functions of tensors, weights and constants. No state, no devices."""

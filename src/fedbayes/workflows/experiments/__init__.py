"""Many runs: seeds, methods, configs and attacks side by side, and tables that compare them."""

"""What is done with models and run folders: fused, compared, exported, calibrated, repeated."""

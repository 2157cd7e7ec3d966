"""Model files in, one model file out: which method fuses them, its settings, and its report."""

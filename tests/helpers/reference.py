"""Settings of the runs whose numbers are written down."""

SETTINGS = {
    "data": {"name": "digits", "clients": 4, "limit": 400},
    "rounds": 2,
    "cohort": 3,
    "training": {"lr": 0.05},
    "calibration": "none",
}


OTHERS = {
    "combined": {"rounds": 1},
    "virtual": {"training": {"optimizer": "adam", "lr": 0.003}},
    "pvi": {"training": {"optimizer": "adam", "lr": 0.003}},
    "dsvgd": {"training": {"optimizer": "adam", "lr": 0.003}},
    "pfedbayes": {"training": {"optimizer": "adam", "lr": 0.003}},
    "fedpa": {"training": {"lr": 0.05, "epochs": 3}},
    "fedgvi": {"training": {"optimizer": "adam", "lr": 0.003}},
    "fedpm": {"training": {"optimizer": "adam", "lr": 0.1}},
    "pfnm": {"model": {"name": "mlp", "init": "normal"}},
    "gpi-fnm": {"model": {"name": "mlp", "init": "normal"}},
}


PARAMETERS = {
    "fedsparse": {"output_gates": True},
    "scaffold-fedsparse": {"output_gates": True},
    "fedl1": {"output_groups": True},
    "fedadam": {"bias_correction": True},
    "fedfuse": {"steps": 8, "drawn": 128},
    "fedpa": {"burn_in_rounds": 1, "shrinkage": 0.1},
    "gpi-fnm": {"form": "wide"},
}

"""COVID-19 among patients of the Hospital Israelita Albert Einstein, São Paulo (2020)."""

from pathlib import Path

import numpy as np

from fedbayes.data.dataset import Dataset, build_dataset
from fedbayes.data.sources.files import incomplete, reading
from fedbayes.errors import DataError

LABEL = "SARS-Cov-2 exam result"
AGE = "Patient age quantile"
BLOOD_COUNT = (
    "Hematocrit",
    "Hemoglobin",
    "Platelets",
    "Mean platelet volume",
    "Red blood Cells",
    "Lymphocytes",
    "Mean corpuscular hemoglobin concentration (MCHC)",
    "Leukocytes",
    "Basophils",
    "Mean corpuscular hemoglobin (MCH)",
    "Eosinophils",
    "Mean corpuscular volume (MCV)",
    "Monocytes",
    "Red blood cell distribution width (RDW)",
)


def read_einstein(name: str, file: Path, complete: bool) -> Dataset:
    """Read the sheet: age quantile and the 14 values of the blood count, against the test.

    These are the columns that a larger group of patients (some 600 of 5,644) has. Which ward a
    patient was sent to is left out, since it was decided after the test.

    Args:
        name: Name of the data set.
        file: The Excel file.
        complete: Only patients of whom all values are known; else all patients.

    Raises:
        DataError: The file is damaged or lacks a column.
    """
    import pandas as pd

    with reading(file):
        sheet = pd.read_excel(file)
    # Some names end in blanks or hold no-break spaces.
    sheet.columns = pd.Index([" ".join(str(column).split()) for column in sheet.columns])
    features = (AGE, *BLOOD_COUNT)
    missing = [column for column in (LABEL, *features) if column not in sheet.columns]
    if missing:
        raise DataError(f"{file} has no column '{missing[0]}'. Download the sheet again")
    with reading(file):
        x = sheet[list(features)].to_numpy(np.float32)
    result = sheet[LABEL].astype(str).str.strip().str.lower().to_numpy()
    odd = ~np.isin(result, ["negative", "positive"])
    if odd.any():
        raise DataError(f"{file}: '{result[odd][0]}' in '{LABEL}' is neither negative nor positive")
    kept = ~np.isnan(x).any(1) if complete else np.ones(len(x), bool)
    notes = incomplete(name, len(x), int(kept.sum()))
    y = (result[kept] == "positive").astype(np.int64)
    classes = ("negative", "positive")
    return build_dataset(name, x[kept], y, classes, features=features, notes=tuple(notes))

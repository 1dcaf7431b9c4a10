"""The words of the house: what a record is, names, options, errors, dtypes."""

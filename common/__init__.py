"""The ground floor: flags, machine, runs and files, for model, training, instruments and data. It imports no model."""

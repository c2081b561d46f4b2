"""What all other folders use: flags, the machine, runs and files. It does not import the model."""

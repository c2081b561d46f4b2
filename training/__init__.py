"""What train.py does around its loop. Everything here knows the model; what also others use is in common/."""

"""What train.py does around its loop, and which value of a knob wins. All of it uses the model.
Code that does not is in common/."""

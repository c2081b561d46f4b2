"""What train.py does around its loop. All of it uses the model. Code that others need as well is in
common/."""

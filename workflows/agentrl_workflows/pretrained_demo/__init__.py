"""The demo with a pretrained model, which learns to use a calculator by text."""

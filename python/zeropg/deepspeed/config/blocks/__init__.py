"""The blocks of DeepSpeed's JSON: a model for each, whose attributes are its keys."""

"""`bench nodes`: collectives over links of given rates, beside gloo and what the links carry."""

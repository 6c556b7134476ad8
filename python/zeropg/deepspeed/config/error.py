"""`ConfigError`: what is wrong with a configuration."""


class ConfigError(ValueError):
    """A configuration that cannot be used: the key, what it has, what was expected, and what to use instead."""

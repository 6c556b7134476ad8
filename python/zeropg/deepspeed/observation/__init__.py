"""What an engine measures of itself: times, traffic and operations, as the configuration asks for."""

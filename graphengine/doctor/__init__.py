"""Says what would go wrong, and its remedy, before anything loads. It never builds an engine."""

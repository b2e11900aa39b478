"""Learn: from what a program tried in some runs to the smallest policy that lets it pass."""

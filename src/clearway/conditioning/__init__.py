"""Plan + text encoders -> Conditioning."""

from clearway.conditioning.encode import encode

__all__ = ["encode"]

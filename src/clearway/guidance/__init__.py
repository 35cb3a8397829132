"""Denoiser -> Denoise: conditionings bound, negative guidance applied. One technique a file."""

from clearway.guidance.cfg import Guided
from clearway.guidance.ngms import below

__all__ = ["Guided", "below"]

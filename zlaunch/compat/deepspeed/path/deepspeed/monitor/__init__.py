"""Trackers of metrics."""

from . import config as config
from . import monitor as monitor

"""Trackers are the script's."""

from . import config as config
from . import monitor as monitor

"""The web pages of `zlaunch ui`, built on the data that `watch` and `report` read."""

"""Keeps shards off the compute device: in page-locked host memory and in NVMe stores."""

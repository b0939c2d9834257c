"""Runs of DeepSpeed and of torch, read with their optimizer."""

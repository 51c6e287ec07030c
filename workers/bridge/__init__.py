"""Engines that are not ours."""

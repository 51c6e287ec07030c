"""Agents beside engines that are not ours."""

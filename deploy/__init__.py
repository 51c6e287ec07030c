"""Deployment files; a package so that an installed `kvroute up` finds haproxy.cfg."""

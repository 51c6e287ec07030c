"""Redis scripts; a package so that an installed kvroute finds them.

Read by app.state.scripts only.
"""

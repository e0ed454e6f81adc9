"""m3cp: context-parallel decode indexing for MiniMax-M3, and the study of where it pays.

Importing the package imports nothing heavy; take what you need from its modules (see the README's tree).
"""

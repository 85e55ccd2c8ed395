"""Attacks on silodp itself: how much of each claim an adversary can really get, and whether every
known mistake would be noticed.
"""

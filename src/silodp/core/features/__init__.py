"""Maps of features: public functions of one record alone, fixed before any record is seen, so that
they cost no privacy.
"""

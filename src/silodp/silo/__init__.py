"""PRIVATE: the only folder that may hold a record."""

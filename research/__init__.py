"""What is compared on what data, carried out and drawn."""

"""What any process needs of its machine: sockets, locks, logs, owners of files, atomic writes."""

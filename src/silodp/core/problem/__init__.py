"""What is learnt: model, loss, penalty, schema and task."""

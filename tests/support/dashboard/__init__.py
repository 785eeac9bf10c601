"""What tests of the dashboard need: logs with known numbers (`logs`), TensorBoard (`server`), a page (`browser`)."""

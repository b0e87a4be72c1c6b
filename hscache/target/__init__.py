"""The target model: what it is, how it is loaded, and how its states are captured."""

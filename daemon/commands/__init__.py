"""The commands of `seedancectl`, by what they are about."""

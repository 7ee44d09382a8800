"""The search for the smallest configuration that keeps the quality asked for."""

"""Tables and pictures of the documents, made from the committed results."""

"""What requests are promised, who goes first where not all can, and what is refused because it would come too late."""

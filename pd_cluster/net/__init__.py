"""ZeroMQ: sockets, mailboxes, and the authentication of peers."""

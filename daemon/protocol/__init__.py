"""The protocols that clients speak, without I/O and without a clock.

Every connection object has the same four verbs: `receive_data` and `receive_eof` take what the peer did,
`events_received` tells what it meant, `data_to_send` gives what to answer. Whatever a peer sends, nothing is raised:
a broken peer shows as an event (`ProtocolFailed`, `Failed`), and the answer that it is owed is in `data_to_send`.
What our own code does out of turn raises `LocalProtocolError`.

* `head`: limits, and one request head: the only reading of a head in the daemon, shared by gateway and worker.
* `chunked`: the chunked transfer coding, both ways.
* `response`: heads of responses, and OpenAI's error object.
* `http`: the server side of one HTTP/1.1 connection.
* `frame`: WebSocket frames: headers, masks, close codes.
* `handshake`: the request that opens a WebSocket.
* `websocket`: the server side of one WebSocket.
* `sse`: server-sent events.
* `fm_server`, `fm_client`: the two ends of an FM session, in whole WebSocket messages; `fm_session` is common to them.
* `fm_frame`, `fm_messages`: FM frames as bytes, and what they say.
* `fm_receiver`, `fm_sender`: order, acknowledgement and back pressure; `fm_states`, `fm_timing`: a session's life.
"""

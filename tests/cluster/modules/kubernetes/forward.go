package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"strings"

	"github.com/spf13/cobra"
)

// forwardCommand copies connections from one address to another. A unix socket in the file system
// crosses a network namespace, so a pair of these makes the API server reachable from outside its own.
func forwardCommand() *cobra.Command {
	var from, to string
	command := &cobra.Command{
		Use: "forward",
		RunE: func(*cobra.Command, []string) error {
			return forward(from, to)
		},
	}
	command.Flags().StringVar(&from, "from", "", "listen here: tcp:HOST:PORT or unix:PATH")
	command.Flags().StringVar(&to, "to", "", "connect there: tcp:HOST:PORT or unix:PATH")
	return command
}

func forward(from, to string) error {
	network, address, _ := strings.Cut(from, ":")
	listener, err := net.Listen(network, address)
	if err != nil {
		return err
	}
	// With port 0 the kernel chooses: the first line says what it chose.
	fmt.Println(listener.Addr())
	network, address, _ = strings.Cut(to, ":")
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			target, err := net.Dial(network, address)
			if err != nil {
				log.Print(err)
				connection.Close()
				return
			}
			go pump(target, connection)
			pump(connection, target)
		}()
	}
}

type halfCloser interface{ CloseWrite() error }

// pump copies until the source ends, then ends the destination's write side only: the answer may still be under way.
func pump(destination, source net.Conn) {
	_, err := io.Copy(destination, source)
	if half, ok := destination.(halfCloser); ok && err == nil {
		half.CloseWrite()
		return
	}
	destination.Close()
	source.Close()
}

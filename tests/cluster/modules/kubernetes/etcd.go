package main

import (
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
)

// etcdCommand serves one etcd member on unix sockets in its data folder: no port to find, and none to clash.
// It keeps nothing past its life, so it never waits for the disk.
func etcdCommand() *cobra.Command {
	var directory string
	command := &cobra.Command{
		Use: "etcd",
		RunE: func(*cobra.Command, []string) error {
			return serveEtcd(directory)
		},
	}
	command.Flags().StringVar(&directory, "data-dir", "", "folder for the data, and for client.sock")
	return command
}

func serveEtcd(directory string) error {
	config := embed.NewConfig()
	config.Dir = directory
	config.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(directory, "client.sock")}}
	config.ListenPeerUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(directory, "peer.sock")}}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	config.UnsafeNoFsync = true
	config.LogLevel = "warn"

	server, err := embed.StartEtcd(config)
	if err != nil {
		return err
	}
	defer server.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	select {
	case <-stop:
		return nil
	case err := <-server.Err():
		return err
	}
}

package main

import (
	"net/url"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
)

// etcdCommand serves one etcd member that keeps nothing past its life: no fsync.
func etcdCommand() *cobra.Command {
	var directory, clientURL, peerURL string
	command := &cobra.Command{
		Use: "etcd",
		RunE: func(*cobra.Command, []string) error {
			return serveEtcd(directory, clientURL, peerURL)
		},
	}
	command.Flags().StringVar(&directory, "data-dir", "", "folder for the data")
	command.Flags().StringVar(&clientURL, "client-url", "", "where clients connect")
	command.Flags().StringVar(&peerURL, "peer-url", "", "where peers would connect")
	return command
}

func serveEtcd(directory, clientURL, peerURL string) error {
	client, err := url.Parse(clientURL)
	if err != nil {
		return err
	}
	peer, err := url.Parse(peerURL)
	if err != nil {
		return err
	}
	config := embed.NewConfig()
	config.Dir = directory
	config.ListenClientUrls = []url.URL{*client}
	config.AdvertiseClientUrls = []url.URL{*client}
	config.ListenPeerUrls = []url.URL{*peer}
	config.AdvertisePeerUrls = []url.URL{*peer}
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
